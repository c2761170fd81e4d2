"""The console: pages on which operators see what the broker knows, and repair what it permits."""

from postroom.chassis import import_quickly

import_quickly()
