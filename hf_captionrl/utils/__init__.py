"""Files, options, messages and other code that every part shares."""
