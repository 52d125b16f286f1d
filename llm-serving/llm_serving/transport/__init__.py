"""How master and WorkAgent talk: typed frames on a socket, large arrays in shared memory, never pickle."""
