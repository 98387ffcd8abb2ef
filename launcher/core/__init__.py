"""The nouns of the domain, plans, checks, events and errors."""
