"""The inventory that `init` writes, from what hosts are."""
