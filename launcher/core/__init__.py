"""The nouns of the domain, plans and their execution, checks, events and errors."""
