"""An S3 server for the tests, with one user; it refuses all others.

Usage: s3_server.py ADDRESS BUCKET.

Prints one line, a JSON object with `url`, `key` and `secret`, and runs until its standard input
ends.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_FIRST = 4  # unauthenticated requests of `main`: user, policy, key, bucket


def main(address: str, bucket: str) -> None:
    """Start the server, create the user and the bucket, and wait."""
    os.environ["INITIAL_NO_AUTH_ACTION_COUNT"] = str(_FIRST)  # read when moto is imported
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    options: dict[str, Any] = {
        "endpoint_url": url,
        "region_name": "us-east-1",
        "aws_access_key_id": "nobody",
        "aws_secret_access_key": "nothing",
    }
    iam = boto3.client("iam", **options)
    iam.create_user(UserName="batch")
    policy = {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}],
    }
    iam.put_user_policy(UserName="batch", PolicyName="all", PolicyDocument=json.dumps(policy))
    access_key = iam.create_access_key(UserName="batch")["AccessKey"]
    boto3.client("s3", **options).create_bucket(Bucket=bucket)
    access = {"url": url, "key": access_key["AccessKeyId"], "secret": access_key["SecretAccessKey"]}
    print(json.dumps(access), flush=True)  # noqa: T201
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
