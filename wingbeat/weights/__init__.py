"""Versioned weights: published as files, received by memory-mapping or over HTTP, proven by checksum.

    publish ◀── overlap      each version once, beside training; the last ones also as deltas (codecs)
    receive ◀── receiver     maps the publisher's file on its host; elsewhere pulls into a store of the host
                  ├── pull       one file, from the nearest source, resumed and verified
                  ├── store      what one host holds, for all its engines
                  └── relay      passes it on to other hosts
    upload                   from a trainer to a control on another host

This module exports nothing, so that ``weights.host`` can be used without torch.
"""
