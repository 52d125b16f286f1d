"""Reading a request (body, headers, caller) and refusing it in the form of its protocol."""
