"""Where orders come in, and where a consumer brings them."""

import json
from functools import cache

from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path

from postroom import Client, Conflict, InvalidMessage, NotPermitted
from postroom.signatures import SIGNATURE, verify
from shop.models import Order


@cache
def post() -> Client:
    """Return the client of this process; a test puts a fake in its place."""
    return Client()


def orders(request: HttpRequest) -> HttpResponse:
    """Accept an order: 202 once it cannot be lost any more, 409 for another one with its number."""
    order = json.loads(request.body)
    try:
        sent = post().send("queue:orders", order, client_message_id=f"order-{order['number']}")
    except InvalidMessage as error:
        return JsonResponse({"detail": str(error)}, status=400)
    except Conflict as error:
        return JsonResponse({"detail": str(error)}, status=409)
    return JsonResponse({"number": order["number"], "repeated": sent.duplicate}, status=202)


def handle(request: HttpRequest) -> HttpResponse:
    """Store what a consumer posts, once: 409 where it is stored already."""
    try:
        verify(settings.POSTROOM_SECRET, request.body, request.headers.get(SIGNATURE))
    except NotPermitted as error:
        return JsonResponse({"detail": str(error)}, status=401)
    order = json.loads(json.loads(request.body)["payload"]["message"]["body"])
    with transaction.atomic():
        values = {"number": order["number"], "total": order["total"]}
        _, first = Order.objects.get_or_create(message=request.headers["Idempotency-Key"], defaults=values)
    return HttpResponse(status=200 if first else 409)


urlpatterns = [path("orders", orders), path("handle", handle)]
