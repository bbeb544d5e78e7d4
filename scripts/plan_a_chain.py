"""Plans a chain in every mode: tries an installed rotoff where nothing else is, not even torch."""

import rotoff

stage = rotoff.Stage("s", forward_time=1.0, backward_time=2.0, output_bytes=10, saved_bytes=30)
chain = rotoff.Chain((stage,) * 8, d2h_bandwidth=10.0, h2d_bandwidth=10.0, input_bytes=10)
for mode in ("remat", "offload", "joint"):
    limit = rotoff.min_mem_limit(chain, mode)
    trace = rotoff.simulate(chain, rotoff.solve(chain, limit, mode=mode), limit)
    assert trace.peak_bytes <= limit and trace.makespan >= rotoff.lower_bound(chain, limit) * (1 - 1e-9)
    print(f"{mode:<8} {trace}")
