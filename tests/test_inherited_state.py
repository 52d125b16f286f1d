import json
import os
import subprocess
import sys
from pathlib import Path

CHILD = """
import json, os, signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
from support.inherited_state import reset_inherited_state
reset_inherited_state()
child = '''
import json, os, signal, sys, time
names = "SIGHUP", "SIGINT", "SIGQUIT"
ignored = [name for name in names if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN]
umask = os.umask(0)
variables = [name for name in os.environ if name.lower() in ("http_proxy", "lc_all", "tz")]
print(json.dumps([ignored, umask, variables, time.timezone, sys.stdin.read()]))
'''
os.kill(os.getpid(), signal.SIGHUP)  # ignored as before
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout)
"""


def test_test_processes_inherit_no_state_of_the_shell():
    hostile = os.environ | {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "x", "TZ": "Asia/Kolkata", "LC_ALL": "C"}
    script = 'trap "" HUP INT QUIT; umask 077; exec "$@" <&-'
    command = ["sh", "-c", script, "sh", sys.executable, "-c", CHILD, str(Path(__file__).parent)]
    ended = subprocess.run(command, env=hostile, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [[], 0o022, [], 0, ""]
