"""From the daemon to the broker: the HTTP client, the features, the relay and how it reads answers."""
