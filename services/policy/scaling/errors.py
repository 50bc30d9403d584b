"""Errors of the Kubernetes API and of the gateway, by what follows from them."""

from __future__ import annotations


class ScalingError(Exception):
    """A call that scaling made did not succeed; `kind` is a label of metrics."""

    kind = "failed"


class ClusterError(ScalingError):
    """A call to the Kubernetes API failed."""


class ApiUnreachable(ClusterError):
    """The API is down or overloaded: try again."""

    kind = "unreachable"


class ApiConflict(ClusterError):
    """The object has changed since it was read: read it again."""

    kind = "conflict"


class ApiForbidden(ClusterError):
    """The service account lacks a permission: its role must be corrected."""

    kind = "forbidden"


class ApiNotFound(ClusterError):
    """The object does not exist."""

    kind = "not_found"


class GatewayError(ScalingError):
    """The gateway did not answer, or refused."""

    kind = "unreachable"


class UnknownInstance(GatewayError):
    """The gateway has no connection to the instance."""
