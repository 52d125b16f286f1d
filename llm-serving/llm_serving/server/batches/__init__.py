"""Files of requests that are answered when there is room: kept in SQLite, so that an end of the process loses none."""
