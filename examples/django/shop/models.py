"""What the shop stores."""

from django.db import models


class Order(models.Model):
    """An order, and the key of the message that brought it."""

    number = models.CharField(max_length=40, unique=True)
    total = models.IntegerField()
    message = models.CharField(max_length=255, unique=True)

    def __str__(self) -> str:
        """Name it, for Django's own pages."""
        return f"order {self.number}"
