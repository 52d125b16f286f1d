"""What an address of the configuration says of who can reach the server."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach the address; a name other than `localhost` may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
