"""The SQLite inbox: what a daemon has received, once each, for local readers to page through and to follow."""

from inbox.inbox import Broken, Inbox, InboxSettings, MessageFilter, Page, StoredMessage, unavailable

__all__ = ["Broken", "Inbox", "InboxSettings", "MessageFilter", "Page", "StoredMessage", "unavailable"]
