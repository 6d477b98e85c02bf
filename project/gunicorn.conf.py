"""gunicorn behind nginx: `gunicorn -c project/gunicorn.conf.py project.wsgi`.

The scheduler is never started from here: it is a process of its own (`runscheduler`).
"""

import os

bind = os.environ.get("WEB_BIND", "127.0.0.1:8000")
workers = int(os.environ.get("WEB_WORKERS", "2"))
# Threads, so that a slow client or an open stream does not hold a whole worker.
worker_class = "gthread"
threads = int(os.environ.get("WEB_THREADS", "8"))
# Each worker connects for itself: sockets to the database and Redis must not be shared.
preload_app = False

timeout = 30
graceful_timeout = 30
# nginx keeps connections to gunicorn open for up to 60 s.
keepalive = 65
max_requests = 10_000
max_requests_jitter = 1_000

# The runtime control socket is on by default and one per user: two sites would collide.
control_socket_disable = True
# Only a proxy on this host may say by X-Forwarded-Proto that the client used TLS.
forwarded_allow_ips = "127.0.0.1,::1"
limit_request_line = 8190

if os.path.isdir("/dev/shm"):  # noqa: S108 - a heartbeat file on disk can stall a worker
    worker_tmp_dir = "/dev/shm"  # noqa: S108
accesslog = "-"
errorlog = "-"
access_log_format = '%({x-forwarded-for}i)s "%(r)s" %(s)s %(b)s %(M)sms'
