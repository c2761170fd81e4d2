"""The SQLite inbox: what a daemon has received, once each, for local readers to page through and to follow."""

from inbox.errors import Broken, unavailable
from inbox.inbox import Inbox, InboxSettings, MessageFilter, Page, StoredMessage

__all__ = ["Broken", "Inbox", "InboxSettings", "MessageFilter", "Page", "StoredMessage", "unavailable"]
