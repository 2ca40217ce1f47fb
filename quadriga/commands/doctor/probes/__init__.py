"""Scripts the doctor runs in processes of their own; each prints JSON lines and is never imported by the doctor."""
