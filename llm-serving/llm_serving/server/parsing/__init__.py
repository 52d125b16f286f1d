"""Reading a request (body, headers, caller), and error responses in the form of each protocol."""
