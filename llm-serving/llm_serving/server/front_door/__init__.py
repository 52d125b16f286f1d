"""The front door: who may connect, and how much and how slowly a client may send before any application sees it.

| Room | What it does |
| --- | --- |
| `turns` | what all clients together may take of one turn of the event loop |
| `acceptor` | takes connections from the listening socket, TLS handshakes among them |
| `waiting_row` | those that were taken and wait for their turn, by address |
| `certificates` | their certificate, read again when its files change |
| `guests` | how many there are, in all and from one address, and the bytes they make the server hold |
| `comebacks` | when those for whom there was no place are to try again |
| `connection` | cuts what arrives into requests, one at a time, within limits of size and time |
| `deciphering` | hands to TLS what arrives, little at a time |
| `reader` | reads what arrives, little at a time |
| `request_head` | the limits of a request line and its headers, as rules over bytes |
| `request_target` | which host a request is for, and which path |
| `framing` | where the body of a request ends |
| `older_http` | what clients of HTTP/1.0 are spared |
| `lane` | writes a piece of a stream at once where it has nothing to wait for |
| `slow_reader` | tells a client that takes a long answer slowly from one that takes none of it |
| `parting` | ends a connection in bounded time, so that the last answer can be read |
| `refusals` | the answers to what never becomes a request |

Every limit is a key of the section `serving_config`.
"""

from llm_serving.server.front_door.acceptor import Acceptor
from llm_serving.server.front_door.certificates import Certificates
from llm_serving.server.front_door.connection import ARRIVED_KEY, HELD_KEY, UNSENT_KEY, Connection
from llm_serving.server.front_door.guests import Guests
from llm_serving.server.front_door.turns import Turns

__all__ = ["ARRIVED_KEY", "HELD_KEY", "UNSENT_KEY", "Acceptor", "Certificates", "Connection", "Guests", "Turns"]
