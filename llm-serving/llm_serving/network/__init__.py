"""Networks as lists of operations on named values: the language, rules that shorten a list, its form as integers."""
