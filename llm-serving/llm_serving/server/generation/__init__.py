"""From a parsed request of any protocol to its response: see `pipeline` for the steps, `response` for the builders."""
