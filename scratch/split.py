import sys, gc, statistics, warnings, torch
import transformers as hf
from bench import compiled_gpu as b
hf.logging.set_verbosity_error(); warnings.simplefilter("ignore"); warnings.filterwarnings("always", message=".*compiled")
name = sys.argv[1]
full, half = b.Shape(8,8,1024), b.Shape(16,4,1024)
kinds = {
 "ref": lambda: b.not_private(name, full, "cuda", is_compiled=True),
 "p8": lambda: b.private(name, full, "cuda", compile=True),
 "p4": lambda: b.private(name, half, "cuda", compile=True),
 "p4-all": lambda: b.private(name, half, "cuda", compile=True, memory_budget=60*2**30),
}
steps, peaks = {}, {}
for kind in sys.argv[2:]:
    gc.collect(); before = torch.cuda.memory_allocated()
    step = kinds[kind]()
    n = {"ref":2,"p8":8,"p4":4,"p4-all":4}[kind]
    w = [b.seconds(step,"cuda") for _ in range(n)]
    torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    b.seconds(step,"cuda")
    peaks[kind] = (torch.cuda.max_memory_allocated()-before)/2**30
    steps[kind] = step
    print(name, kind, "warm", [round(x,2) for x in w], "peak", round(peaks[kind],2), flush=True)
times = {k: [] for k in steps}
for r in range(4):
    for k in list(steps)[r%len(steps):]+list(steps)[:r%len(steps)]:
        times[k].append(b.seconds(steps[k],"cuda"))
for k in steps:
    print(name, k, round(statistics.median(times[k]),3), "ratio", round(statistics.median([x/y for x,y in zip(times[k],times["ref"])]),4), "mem", round(peaks[k]/peaks["ref"],3), flush=True)
