"""Things sent to nodes: archives, files, certificates, and the build of an image."""
