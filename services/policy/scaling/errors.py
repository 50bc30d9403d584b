"""What can go wrong with the Kubernetes API, by what follows from it."""

from __future__ import annotations


class ClusterError(Exception):
    """A call to the Kubernetes API that did not succeed; `kind` is a label of metrics."""

    kind = "failed"


class ApiUnreachable(ClusterError):
    """The API is down, or answers that it is: try again."""

    kind = "unreachable"


class ApiConflict(ClusterError):
    """Somebody else has changed the object since it was read: read it again."""

    kind = "conflict"


class ApiForbidden(ClusterError):
    """The service account may not do that: somebody has to mend the role."""

    kind = "forbidden"


class ApiNotFound(ClusterError):
    """There is no such object."""

    kind = "not_found"
