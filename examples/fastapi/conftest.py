"""What the tests of the shop share."""

pytest_plugins = ["postroom.testing.fixtures"]
