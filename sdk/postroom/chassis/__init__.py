"""The chassis under every process of Postroom: config, logs, start and stop, systemd, routes, SQL files, metrics."""
