"""Which error of ours an error of a client library is.

Told apart by the server's code, its status, the names of the classes, and `errno`, in that order, without importing any
client: what is not installed cannot have raised.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from resilient.errors import ErrorKind, NotFoundError, ResilientError, StoreError
from resilient.store.obstore_replies import Reply, reply


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: ErrorKind
    retryable: bool = False
    hint: str | None = None


_PASSING = _Fault(ErrorKind.IO, retryable=True)
_THROTTLED = _Fault(ErrorKind.THROTTLED, retryable=True, hint="fewer or larger requests, or ask the provider for more")
_UNREACHABLE = _Fault(
    ErrorKind.UNREACHABLE,
    retryable=True,
    hint="check address, proxy and network; AWS_ENDPOINT_URL names another endpoint",
)
_LATE = _Fault(ErrorKind.DEADLINE, retryable=True)
_CREDENTIALS = _Fault(
    ErrorKind.BAD_CREDENTIALS,
    hint="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE (Google: GOOGLE_APPLICATION_CREDENTIALS, Azure: "
    "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY), or storage_options",
)
_SKEWED = _Fault(ErrorKind.BAD_CREDENTIALS, hint="the clock of this machine is wrong: signatures carry the time")
_DENIED = _Fault(
    ErrorKind.ACCESS_DENIED,
    hint="allow listing the bucket (without that, a missing object is answered like a forbidden one), and getting, "
    "putting and deleting objects below the prefix",
)
_ELSEWHERE = _Fault(
    ErrorKind.UNREACHABLE, hint="the bucket is in another region: set AWS_DEFAULT_REGION to the one that it is in"
)
_NO_BUCKET = _Fault(
    ErrorKind.NO_SUCH_BUCKET, hint="make the bucket, or correct its name: it is never made automatically"
)
_FULL = _Fault(ErrorKind.NO_SPACE, hint="free space or quota there, or keep fewer checkpoints")
_UNCONDITIONAL = _Fault(
    ErrorKind.UNTRUSTWORTHY_STORE, hint="this server lacks a call that safe saving needs: choose another, or update it"
)
_OBSTRUCTED = _Fault(ErrorKind.IO, hint="a file is where a directory should be, or the reverse: choose another place")
_ABSENT = _Fault(ErrorKind.NO_SUCH_OBJECT)
_OTHER = _Fault(ErrorKind.IO)

_BY_CODE: Final[Mapping[str, _Fault]] = {
    **dict.fromkeys(("NoSuchBucket", "ContainerNotFound"), _NO_BUCKET),
    **dict.fromkeys(("NoSuchKey", "NotFound", "404", "BlobNotFound"), _ABSENT),
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed"), _ELSEWHERE),
    **dict.fromkeys(
        (
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "ExpiredToken",
            "InvalidToken",
            "TokenRefreshRequired",
            "NotSignedUp",
            "AuthenticationFailed",
            "AuthenticationRequired",
            "NoAuthenticationInformation",
        ),
        _CREDENTIALS,
    ),
    "RequestTimeTooSkewed": _SKEWED,
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden"), _DENIED),
    **dict.fromkeys(
        (
            "SlowDown",
            "ServiceUnavailable",
            "TooManyRequests",
            "Throttling",
            "ThrottlingException",
            "RequestLimitExceeded",
            "ServerBusy",
        ),
        _THROTTLED,
    ),
    **dict.fromkeys(
        (
            "InternalError",
            "RequestTimeout",
            "IncompleteBody",
            "BadDigest",
            "InvalidDigest",
            "Md5Mismatch",
            "XAmzContentSHA256Mismatch",
            "OperationAborted",
            "ConditionalRequestConflict",
            "NoSuchUpload",
            "InvalidPart",
            "MalformedXML",  # what we send is well formed: it was damaged on its way
        ),
        _PASSING,
    ),
    **dict.fromkeys(("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"), _FULL),
    "NotImplemented": _UNCONDITIONAL,
}

_BY_STATUS: Final[Mapping[int, _Fault]] = {
    401: _CREDENTIALS,
    403: _DENIED,
    404: _ABSENT,
    408: _LATE,
    409: _PASSING,
    429: _THROTTLED,
    500: _PASSING,
    501: _UNCONDITIONAL,
    502: _PASSING,
    503: _THROTTLED,
    504: _PASSING,
    507: _FULL,
}

# How obstore names what happens to a request on its way.
_BY_TRANSPORT: Final[Mapping[str, _Fault]] = {
    "Connect": _UNREACHABLE,
    "Timeout": _LATE,
    **dict.fromkeys(("Request", "Interrupted", "Decode"), _PASSING),
}

# Names of exception classes, of botocore, obstore, aiohttp, fsspec and Python, and what any class below them is.
_BY_CLASS: Final[Mapping[str, _Fault]] = {
    **dict.fromkeys(
        (
            "NoCredentialsError",
            "PartialCredentialsError",
            "CredentialRetrievalError",
            "ProfileNotFound",
            "TokenRetrievalError",
            "UnauthenticatedError",
        ),
        _CREDENTIALS,
    ),
    **dict.fromkeys(
        ("ReadTimeoutError", "FSTimeoutError", "ServerTimeoutError", "TimeoutError"),
        _LATE,
    ),
    **dict.fromkeys(
        (
            "EndpointConnectionError",
            "ConnectTimeoutError",
            "ProxyConnectionError",
            "ConnectionClosedError",
            "SSLError",
            "HTTPClientError",
            "ClientConnectionError",
            "ConnectionError",
            "gaierror",
        ),
        _UNREACHABLE,
    ),
    **dict.fromkeys(
        (
            "ClientPayloadError",
            "IncompleteReadError",
            "IncompleteRead",
            "ResponseStreamingError",
            "ResponseParserError",
            "FlexibleChecksumError",
        ),
        _PASSING,
    ),
    "FileNotFoundError": _ABSENT,
    **dict.fromkeys(("IsADirectoryError", "NotADirectoryError"), _OBSTRUCTED),
    **dict.fromkeys(("PermissionError", "PermissionDeniedError"), _DENIED),
    **dict.fromkeys(("NotImplementedError", "NotSupportedError"), _UNCONDITIONAL),
}

_BY_ERRNO: Final[Mapping[int, _Fault]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    **dict.fromkeys((errno.EAGAIN, errno.EBUSY, errno.EIO, errno.EINTR, errno.ESTALE), _PASSING),
    errno.EREMOTEIO: _PASSING,
}


@contextmanager
def faults(doing: str, place: str, *, reads: bool = False) -> Iterator[None]:
    """Translate whatever a client library raises; ``doing`` names verb and key.

    Only a call that ``reads`` one object may find it absent. Where any other finds something absent, it is the bucket,
    or the address is not that of such a store: taken for an absent object, that would look like an empty place.
    """
    try:
        yield
    except ResilientError:
        raise
    except Exception as error:  # noqa: BLE001 -- client libraries raise what they like: all of it becomes ours
        said = reply(error)
        translated = _translated(error, f"{doing} in {place}", said, reads=reads)
        # Shown as a cause, an error of obstore is a page of Rust, whose first lines ours has.
        raise translated from (error if said is None else None)


def server_code(error: BaseException) -> tuple[str, int]:
    """Return the server's error code and status (empty and 0 if none) from an exception or what caused it."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, Mapping):
            code = str(response.get("Error", {}).get("Code", ""))
            return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        cause = cause.__cause__
    return "", 0


def _translated(error: Exception, doing: str, said: Reply | None, *, reads: bool) -> ResilientError:
    fault = _classified(error) if said is None else _of_reply(said) or _of_class(error)
    if reads and fault in {_ABSENT, _OBSTRUCTED}:
        return NotFoundError(f"{doing}: there is no such object", kind=_ABSENT.kind)
    if fault is _ABSENT:
        fault = _NO_BUCKET
    text = said.text if said else str(error)
    text = text or type(error).__name__
    code, _ = server_code(error)
    message = f"{doing} failed: {text}" if not code or code in text else f"{doing} failed: {code}: {text}"
    return StoreError(message, kind=fault.kind, hint=fault.hint, retryable=fault.retryable)


def _of_reply(said: Reply) -> _Fault | None:
    if said.signing_in and said.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return _CREDENTIALS  # no such service here: nobody gives this machine a token
    return _BY_CODE.get(said.code) or _BY_STATUS.get(said.status) or _BY_TRANSPORT.get(said.transport)


def _classified(error: Exception) -> _Fault:
    code, status = server_code(error)
    return _BY_CODE.get(code) or _BY_STATUS.get(status) or _of_class(error)


def _of_class(error: Exception) -> _Fault:
    for base in type(error).__mro__:
        if found := _BY_CLASS.get(base.__name__):
            return found
    return _BY_ERRNO.get(error.errno or 0, _OTHER) if isinstance(error, OSError) else _OTHER
