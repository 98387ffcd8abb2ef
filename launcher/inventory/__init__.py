"""The inventory file: schema, rules, errors."""
