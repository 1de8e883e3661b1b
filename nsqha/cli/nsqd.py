"""`nsqd`: the broker with nsqd's flags and config files."""

from __future__ import annotations

import errno
import gc
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from nsqha.cli.terminal import exits
from nsqha.cluster_secret import read_secret
from nsqha.errors import ConfigError, NsqhaError
from nsqha.options import Options, nsqd_command_line

if TYPE_CHECKING:
    from nsqha.admin.service import AdminServer
    from nsqha.server.node.broker import Broker
    from nsqha.server.peers.calls import GrpcPeerServer
    from nsqha.server.runtime.certificates import CertificateFiles


def main() -> NoReturn:
    loaded = nsqd_command_line(sys.argv[1:], os.environ)
    exits.run(lambda: run(loaded.options, loaded.notices))


def run(options: Options, notices: tuple[str, ...]) -> int:
    """Serve until SIGINT or SIGTERM; the exit status is 1 if the node cannot start or its disk fails."""
    # What follows costs a quarter of a second to import; --help and --version do without.
    from nsqha import nsqlog

    nsqlog.configure(prefix=options.log_prefix, level=options.log_level, format=options.log_format)
    logger = nsqlog.Logger("node")
    for notice in notices:
        logger.info("flag_without_meaning", "%s", notice)
    gc.disable()  # to import makes a hundred thousand objects that stay, and no garbage
    try:
        from nsqha.server.runtime.listen import listen_all

        sockets = listen_all(options)  # clients that connect during the rest of the start wait, and are not refused
        from nsqha.server.node.start import advice, serve_until_signal
    except ConfigError as error:
        logger.fatal("start_failed", "%s", error)
        return exits.FAILED
    finally:
        gc.freeze()
        gc.enable()

    try:
        return serve_until_signal(options, open_grpc, sockets)
    except (NsqhaError, OSError) as error:
        if _of_a_full_disk(error):
            # A node cannot start without writing its journal and its promises.
            text = "--data-path=%s: the disk is full, and a start needs some MB; free space and start again: %s"
            logger.fatal("start_failed", text, options.data_path, error)
        elif isinstance(error, NsqhaError):
            logger.fatal("start_failed", "%s", error)
        elif error.filename is None:
            raise
        else:  # of the data folder: another user's file, a disk that is mounted read-only
            why = f"{error.strerror}{advice(error)}"
            logger.fatal("start_failed", "--data-path=%s: %s: %s", options.data_path, error.filename, why)
    return exits.FAILED


def open_grpc(broker: Broker, address: str, peers: GrpcPeerServer | None, tls: CertificateFiles | None) -> AdminServer:
    """The gRPC listener of a node, with all its services (`OpenGrpc`)."""
    from nsqha.admin.service import AdminServer

    secret, at = read_secret(broker.options.cluster_secret_file), broker.endpoints
    return AdminServer(
        broker,
        address,
        peers,
        tls=tls,
        secret=secret,
        guard=at.guard,
        audit=at.audit,
        audit_topic=broker.options.audit_topic,
    )


def _of_a_full_disk(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


if __name__ == "__main__":
    main()
