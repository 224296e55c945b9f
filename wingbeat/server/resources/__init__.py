"""Resources over HTTP: what pools report to control, and the server that pools scarce things for many clients."""
