"""vLLM as an engine: real servers, started here or elsewhere, spoken to over HTTP.

    flags.py      what a server is started with
    server.py     the process, or one that runs already
    inside/       what runs within vLLM's own interpreter; imports nothing of Wingbeat
    client.py     requests, streams and commands, on a thread of its own
    wire.py       their bodies
    supports.py   from what each token was drawn
    requests.py   one request: what vLLM says of it, as token events
    served.py     what a server serves, and the versions of its tokens
    engine.py     the engine of one server: models, weights, recovery

Every token comes with its logprob after temperature, grammar, top-k and top-p, and with the version of the weights
that sampled it, as vLLM itself counts it.
"""
