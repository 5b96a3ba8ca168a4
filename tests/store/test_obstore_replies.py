from __future__ import annotations

import pytest
from obstore.exceptions import GenericError, UnauthenticatedError

from resilient.errors import ErrorKind, StoreError
from resilient.store.obstore_replies import reply
from resilient.store.remote_faults import faults

GET = "Error performing GET https://bucket.example/run/key?sv=1&sig=very-secret in 1.2ms - "


def refused(status: str, code: str = "", message: str = "") -> GenericError:
    document = f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>' if code else ""
    said = f"Generic S3 error: {GET}Server returned non-2xx status code: {status}: {document}"
    return GenericError(f"{said}\n\nDebug source:\nGeneric {{\n    retries: 0,\n}}")


def broken(transport: str, *quoted: str) -> GenericError:
    quotes = "".join(f'"{each}", ' for each in quoted)
    details = f"Generic {{ inner: Http(\n  HttpError {{\n    kind: {transport},\n    source: Os {{ {quotes}}} }} ) }}"
    return GenericError(f"Generic S3 error: {GET}HTTP error: error sending request\n\nDebug source:\n{details}")


NO_TOKEN = GenericError(
    "Generic GCS error: Error performing token request: Error performing GET http://169.254.169.254/token?x=y in 1ms - "
    "Server returned non-2xx status code: 404 Not Found: \n\nDebug source:\nGeneric {}"
)

CASES = [
    (refused("400 Bad Request", "BadDigest", "wrong"), ErrorKind.IO, True, "BadDigest: wrong"),
    (refused("403 Forbidden", "AccessDenied", "no"), ErrorKind.ACCESS_DENIED, False, "AccessDenied: no"),
    (refused("403 Forbidden", "SignatureDoesNotMatch", "no"), ErrorKind.BAD_CREDENTIALS, False, "SignatureDoesNot"),
    (refused("404 Not Found", "ContainerNotFound", "no"), ErrorKind.NO_SUCH_BUCKET, False, "ContainerNotFound"),
    (refused("404 Not Found"), ErrorKind.NO_SUCH_BUCKET, False, "404 Not Found"),
    (refused("301 Moved", "PermanentRedirect", "go"), ErrorKind.UNREACHABLE, False, "PermanentRedirect: go"),
    (refused("503 Service Unavailable", "SlowDown", "less"), ErrorKind.THROTTLED, True, "SlowDown: less"),
    (refused("500 Internal Server Error"), ErrorKind.IO, True, "500 Internal Server Error"),
    (broken("Connect", "tcp connect error", "Connection refused"), ErrorKind.UNREACHABLE, True, "Connection refused"),
    (broken("Timeout"), ErrorKind.DEADLINE, True, "no answer in time"),
    (broken("Request"), ErrorKind.IO, True, "error sending request"),
    (broken("Interrupted"), ErrorKind.IO, True, "error sending request"),
    (refused("400 Bad Request", "MalformedXML", "not well-formed"), ErrorKind.IO, True, "MalformedXML"),
    (
        GenericError("Generic S3 error: Got invalid multipart response: ill-formed document\n\nDebug source:\nX {}"),
        ErrorKind.IO,
        True,
        "ill-formed document",
    ),
    (NO_TOKEN, ErrorKind.BAD_CREDENTIALS, False, "GET http://169.254.169.254/token"),
    (UnauthenticatedError("no keys\n\nDebug source:\nX {}"), ErrorKind.BAD_CREDENTIALS, False, "no keys"),
    (GenericError("Generic S3 error: what nobody has seen\n\nDebug source:\nX {}"), ErrorKind.IO, False, "nobody"),
]


@pytest.mark.parametrize(
    ("error", "kind", "retryable", "says"), CASES, ids=[f"{number}-{case[3]}" for number, case in enumerate(CASES)]
)
def test_what_obstore_says_is_told_in_few_words(error: Exception, kind: ErrorKind, retryable: bool, says: str) -> None:
    with pytest.raises(StoreError) as caught, faults("put of 'key'", "s3://bucket/run"):
        raise error
    said = str(caught.value)
    assert (caught.value.kind, caught.value.retryable) == (kind, retryable)
    assert said.startswith("put of 'key' in s3://bucket/run failed: ")
    assert says in said
    for noise in ("Debug source", "<", "Generic", "very-secret"):
        assert noise not in said
    assert caught.value.__cause__ is None, "a page of Rust, which holds the query of the address"


def test_errors_of_others_say_nothing_of_obstore() -> None:
    assert reply(FileNotFoundError("a file")) is None
    assert reply(ValueError("Error performing GET http://x in 1ms - HTTP error")) is None
