"""The shipped nginx, gunicorn and Supervisor files, run from copies on free ports."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services import free_port, redis_server, wait_for

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parent.parent.parent
SERVER_NAME = "distcron.example.org"
SUPERVISORD = shutil.which("supervisord") or "/usr/bin/supervisord"
NGINX = shutil.which("nginx") or "/usr/sbin/nginx"

NGINX_FRAME = """
daemon off;
{user}
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log;
events {{ worker_connections 64; }}
http {{
    include /etc/nginx/mime.types;
    access_log off;
    client_body_temp_path {folder}/temp-body;
    proxy_temp_path {folder}/temp-proxy;
    fastcgi_temp_path {folder}/temp-fastcgi;
    uwsgi_temp_path {folder}/temp-uwsgi;
    scgi_temp_path {folder}/temp-scgi;
    include {folder}/nginx/distcron.conf;
}}
"""
SUPERVISOR_FRAME = """
[unix_http_server]
file={folder}/supervisor.sock
[supervisord]
nodaemon=true
logfile={folder}/supervisord.log
pidfile={folder}/supervisord.pid
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
[supervisorctl]
serverurl=unix://{folder}/supervisor.sock
[include]
files={folder}/distcron.conf
"""
ADD_REPORT = """
from distcron_app.instants import database_now
from distcron_app.models import Schedule
from datetime import timedelta
Schedule.objects.create(
    key="report", name="report", job="project.demo.slow_report", arguments={"seconds": 4},
    kind="once", run_at=database_now() + timedelta(seconds=1),
)
"""


class Deployment:
    """One host: nginx, and a Supervisor with the web server and a scheduler node."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.http_port, self.https_port, self.web_port = free_port(), free_port(), free_port()
        self.database = folder / "db.sqlite3"
        self.environment = {
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "DJANGO_SECRET_KEY": "a-long-enough-key-for-tests-" * 2,
            "DJANGO_ALLOWED_HOSTS": SERVER_NAME,
            "DJANGO_BEHIND_TLS": "1",
            "DJANGO_STATIC_ROOT": str(folder / "static"),
            "DATABASE_URL": f"sqlite://{self.database}",
            "REDIS_URL": redis_url,
            "WEB_BIND": f"127.0.0.1:{self.web_port}",
            "WEB_WORKERS": "1",
        }
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Install the copies and start both programs."""
        self._make_certificate()
        self._copy_nginx()
        self._copy_supervisor()
        self.manage("migrate", "--verbosity=0")
        self.manage("collectstatic", "--noinput", "--verbosity=0")
        self._spawn("supervisord", SUPERVISORD, "-n", "-c", str(self.folder / "supervisord.conf"))
        self._spawn("nginx", NGINX, "-c", str(self.folder / "nginx.conf"))
        wait_for(lambda: self._accepts(self.https_port), 20, "nginx")
        wait_for(lambda: self._accepts(self.web_port), 30, "gunicorn")
        wait_for(self.active_node, 30, "an active node")

    def stop(self) -> None:
        """Stop nginx, then Supervisor, which stops its programs."""
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            process.wait(60)

    def manage(self, *arguments: str) -> str:
        """Run a management command of this deployment."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def supervisorctl(self, *arguments: str) -> str:
        """Run a command of supervisorctl and return what it prints."""
        command = ["supervisorctl", "-c", str(self.folder / "supervisord.conf"), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Read rows of the deployment's database."""
        with contextlib.closing(sqlite3.connect(self.database, timeout=10)) as connection:
            return connection.execute(sql).fetchall()

    def active_node(self) -> tuple[str, int] | None:
        """Return id and pid of the node that is active, if one is."""
        rows = self.query("SELECT id, pid FROM distcron_node WHERE state = 'active'")
        alive = [(node, pid) for node, pid in rows if Path(f"/proc/{pid}").exists()]
        return alive[0] if alive else None

    def get(self, path: str, *, tls: bool = True, **headers: str) -> http.client.HTTPResponse:
        """Ask nginx for ``path`` under the server's name; the reply has been read."""
        return self._request("GET", path, tls=tls, headers=headers)

    def post(self, path: str) -> int:
        """Post nothing and return the status."""
        return self._request("POST", path, tls=True, headers={}).status

    def tls_version(self, version: ssl.TLSVersion) -> str | None:
        """Return what is negotiated by a client that speaks ``version`` only."""
        context = self._trusting_context()
        context.minimum_version = context.maximum_version = version
        with (
            socket.create_connection(("127.0.0.1", self.https_port), 5) as link,
            context.wrap_socket(link, server_hostname=SERVER_NAME) as secured,
        ):
            return secured.version()

    def _request(
        self, method: str, path: str, *, tls: bool, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        port = self.https_port if tls else self.http_port
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        link.connect()
        if tls:
            context = self._trusting_context()
            link.sock = context.wrap_socket(link.sock, server_hostname=SERVER_NAME)
        with contextlib.closing(link):
            link.request(method, path, headers={"Host": SERVER_NAME, **headers})
            reply = link.getresponse()
            reply.body = reply.read()  # type: ignore[attr-defined]
            return reply

    def _trusting_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.folder / "tls" / "fullchain.pem"))

    def _make_certificate(self) -> None:
        (self.folder / "tls").mkdir()
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", f"/CN={SERVER_NAME}"),
                *("-addext", f"subjectAltName=DNS:{SERVER_NAME}"),
                *("-keyout", "tls/privkey.pem", "-out", "tls/fullchain.pem"),
            ],
            cwd=self.folder,
            check=True,
            capture_output=True,
        )

    def _copy_nginx(self) -> None:
        (self.folder / "nginx").mkdir()
        for shipped in (ROOT / "nginx").glob("*.conf"):
            text = shipped.read_text()
            for there, here in (
                ("listen 80", f"listen 127.0.0.1:{self.http_port}"),
                ("listen 443", f"listen 127.0.0.1:{self.https_port}"),
                ("server 127.0.0.1:8000", f"server 127.0.0.1:{self.web_port}"),
                ("/etc/nginx/distcron/", f"{self.folder}/nginx/"),
                ("/etc/distcron/", f"{self.folder}/"),
                ("/srv/distcron/", f"{self.folder}/"),
            ):
                text = text.replace(there, here)
            (self.folder / "nginx" / shipped.name).write_text(text)
        user = "user root;" if os.geteuid() == 0 else ""
        frame = NGINX_FRAME.format(folder=self.folder, user=user)
        (self.folder / "nginx.conf").write_text(frame)

    def _copy_supervisor(self) -> None:
        text = (ROOT / "deploy" / "supervisor" / "distcron.conf").read_text()
        for there, here in (
            ("user=distcron\n", ""),
            ("/etc/distcron/env", f"{self.folder}/env"),
            ("/srv/distcron/venv/bin/python", sys.executable),
            ("/srv/distcron/app", str(ROOT)),
            ("/var/log/distcron/", f"{self.folder}/"),
        ):
            assert there in text, there
            text = text.replace(there, here)
        (self.folder / "distcron.conf").write_text(text)
        frame = SUPERVISOR_FRAME.format(folder=self.folder)
        (self.folder / "supervisord.conf").write_text(frame)
        lines = [f"{name}='{value}'\n" for name, value in self.environment.items()]
        (self.folder / "env").write_text("".join(lines))

    def _spawn(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _accepts(self, port: int) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        return False


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    with redis_server(appendonly=True) as redis:
        host = Deployment(folder, redis.url)
        try:
            host.start()
            yield host
        finally:
            host.stop()


def test_nginx_accepts_the_shipped_file(deployment: Deployment) -> None:
    command = [NGINX, "-t", "-c", str(deployment.folder / "nginx.conf")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "syntax is ok" in done.stderr
    assert "warn" not in done.stderr


def test_a_page_answers_through_tls_with_each_security_header_once(deployment: Deployment) -> None:
    reply = deployment.get("/admin/login/")
    assert reply.status == 200
    found = {name.lower(): reply.headers.get_all(name) for name in reply.headers}
    assert found["strict-transport-security"] == ["max-age=31536000; includeSubDomains"]
    assert found["x-frame-options"] == ["DENY"]
    assert found["x-content-type-options"] == ["nosniff"]
    assert found["referrer-policy"] == ["same-origin"]
    assert len(found["permissions-policy"]) == 1
    assert found["server"] == ["nginx"]


def test_the_policy_of_a_page_is_said_once_and_by_django(deployment: Deployment) -> None:
    policies = deployment.get("/login/").headers.get_all("Content-Security-Policy")
    assert policies is not None and len(policies) == 1
    assert "default-src 'none'" in policies[0]


def test_the_pages_ask_for_a_login_under_https(deployment: Deployment) -> None:
    reply = deployment.get("/cron/")
    assert reply.status == 302
    assert reply.headers["Location"] == "/login/?next=/cron/"


def test_a_probe_of_this_host_gets_an_answer(deployment: Deployment) -> None:
    assert deployment.get("/live").status == 200
    assert deployment.get("/ready").status == 200


def test_cookies_of_the_login_page_are_for_https_only(deployment: Deployment) -> None:
    cookies = deployment.get("/admin/login/").headers.get_all("Set-Cookie")
    assert cookies and all("Secure" in cookie for cookie in cookies)


def test_plain_http_is_sent_to_https(deployment: Deployment) -> None:
    reply = deployment.get("/admin/?next=1", tls=False)
    assert reply.status == 301
    assert reply.headers["Location"] == f"https://{SERVER_NAME}/admin/?next=1"


def test_a_request_for_another_name_gets_no_answer(deployment: Deployment) -> None:
    with pytest.raises(http.client.RemoteDisconnected):
        deployment.get("/admin/login/", Host="evil.example.org")


def test_a_forged_forwarding_header_changes_nothing(deployment: Deployment) -> None:
    forged = {
        "X-Forwarded-Proto": "http",
        "X-Forwarded-Host": "evil.example.org",
        "X-Forwarded-For": "203.0.113.9",
    }
    assert deployment.get("/admin/login/", **forged).status == 200
    log = (deployment.folder / "web.log").read_text()
    assert "203.0.113.9" not in log
    assert '127.0.0.1 "GET /admin/login/' in log


def test_tls_1_2_and_1_3_are_spoken(deployment: Deployment) -> None:
    assert deployment.tls_version(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    assert deployment.tls_version(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"


def test_static_files_come_from_nginx(deployment: Deployment) -> None:
    reply = deployment.get("/static/admin/css/base.css")
    assert reply.status == 200
    assert reply.headers["Content-Type"].startswith("text/css")
    assert reply.headers.get_all("X-Content-Type-Options") == ["nosniff"]
    assert reply.headers.get_all("Strict-Transport-Security")
    log = (deployment.folder / "web.log").read_text()
    assert "/static/admin/css/base.css" not in log


def test_guessing_passwords_is_slowed_down_and_the_page_stays_readable(
    deployment: Deployment,
) -> None:
    statuses = [deployment.post("/admin/login/") for _ in range(8)]
    assert statuses[0] == 403  # no CSRF token
    assert statuses[-1] == 429
    assert deployment.get("/admin/login/").status == 200


def test_a_killed_node_is_back_under_a_new_id(deployment: Deployment) -> None:
    before = deployment.active_node()
    assert before is not None
    os.kill(before[1], signal.SIGKILL)

    def is_back() -> bool:
        now = deployment.active_node()
        return now is not None and now[0] != before[0]

    wait_for(is_back, 10, "the node to be back")


def test_a_stop_lets_a_running_job_finish(deployment: Deployment) -> None:
    deployment.manage("shell", "-c", ADD_REPORT)
    state = "SELECT state FROM distcron_run WHERE schedule_name = 'report'"
    wait_for(lambda: deployment.query(state) == [("running",)], 15, "the run to start")
    node = deployment.active_node()
    assert node is not None
    assert "stopped" in deployment.supervisorctl("stop", "distcron-scheduler")
    assert deployment.query(state) == [("succeeded",)]
    left = deployment.query(f"SELECT id, state FROM distcron_node WHERE pid = {node[1]}")
    assert left == [(node[0], "left")]
    log = (deployment.folder / "supervisord.log").read_text()
    assert "stopped: distcron-scheduler (exit status 0)" in log
    events = [json.loads(line) for line in _json_lines(deployment.folder / "scheduler.log")]
    assert [event["event"] for event in events][-1] == "left"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with redis_server() as redis:
        host = Deployment(tmp_path, redis.url)
        try:
            host.start()
        finally:
            host.stop()
    wait_for(lambda: not _processes_naming(str(tmp_path)), 5, "the end of all processes")


def _json_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("{")]


def _processes_naming(folder: str) -> list[str]:
    """Return processes whose command or environment names the deployment's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            facts = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            if folder.encode() in facts and int(process.name) != os.getpid():
                found.append(facts.decode(errors="replace"))
    return found
