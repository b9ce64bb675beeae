"""`splitserve` as a build with the next wire version:

python -m support.next_build prefill --model M ...
"""

from __future__ import annotations

from splitserve.transport.messages import fields

fields.WIRE_VERSION += 1  # before anything else has read it

if __name__ == "__main__":
    from splitserve.cli.main import main

    main()
