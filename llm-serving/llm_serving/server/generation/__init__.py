"""The path from a parsed request of any protocol to its response: `pipeline` has the steps, `response` the builders."""
