"""The settings of the shop."""

import os

ALLOWED_HOSTS = ["127.0.0.1", "testserver"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ.get("SHOP_DATABASE", "shop.db")}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["shop"]
POSTROOM_SECRET = os.environ.get("SHOP_SECRET", "a secret of both sides").encode()
ROOT_URLCONF = "shop.views"
SECRET_KEY = os.environ.get("SHOP_KEY", "no sessions, so nothing is signed with it")
