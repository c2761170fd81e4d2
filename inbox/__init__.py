"""The SQLite inbox: what a daemon has received, once each, for local readers to page through and to follow."""

from inbox.errors import Broken
from inbox.inbox import Inbox, now_ms
from inbox.model import MessageFilter, Page, StoredMessage
from inbox.settings import InboxSettings

__all__ = ["Broken", "Inbox", "InboxSettings", "MessageFilter", "Page", "StoredMessage", "now_ms"]
