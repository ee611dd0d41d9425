import sys, gc, warnings, torch
import transformers as hf
from collections import Counter
from bench import compiled_gpu as b
hf.logging.set_verbosity_error(); warnings.simplefilter("ignore")
layers = int(sys.argv[1])
def opt():
    return hf.OPTForCausalLM(hf.OPTConfig(hidden_size=2048,num_hidden_layers=layers,num_attention_heads=32,ffn_dim=8192,word_embed_proj_dim=2048,max_position_embeddings=4096,dropout=0.0,use_cache=False))
b.MODELS["o"] = opt
shape = b.Shape(2,8,1024)
def look(kind, step):
    for _ in range(2): step()
    torch.cuda.synchronize(); torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=400000, context="alloc", stacks="python")
    step(); torch.cuda.synchronize()
    snap = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    print(kind, "base", base/2**30, "peak", torch.cuda.max_memory_allocated()/2**30, flush=True)
    trace = snap["device_traces"][0]
    alive, total, best, at = {}, 0, -1, 0
    for i, e in enumerate(trace):
        if e["action"] == "alloc": alive[e["addr"]] = e["size"]; total += e["size"]
        elif e["action"] == "free_completed":
            total -= alive.pop(e["addr"], 0)
        if total > best: best, at = total, i
    alive = {}
    for e in trace[:at+1]:
        if e["action"] == "alloc": alive[e["addr"]] = e
        elif e["action"] == "free_completed": alive.pop(e["addr"], None)
    print("peak over base by trace", best/2**30, "event", at, "of", len(trace))
    groups = Counter(); counts = Counter()
    for e in alive.values():
        f = [x for x in e.get("frames", []) ]
        names = []
        for x in f:
            fn = x["filename"]
            if "site-packages/torch" in fn or "dist-packages/torch" in fn: continue
            short = "IND" if "/ind/" in fn else "/".join(fn.split("/")[-2:])
            names.append(short + (":" + x["name"] + ":" + str(x["line"]) if short != "IND" else ""))
            if len(names) == 2: break
        key = (round(e["size"]/2**20,1), " < ".join(names))
        groups[key] += e["size"]; counts[key] += 1
    for key, size in groups.most_common(24):
        print(f"{size/2**30:.3f} GiB  {counts[key]} x {key[0]} MiB  {key[1]}")
    e = trace[at]
    print("PEAK EVENT", e["action"], e["size"]/2**20, [ (x["filename"].split("/")[-1], x["name"], x["line"]) for x in e["frames"][:14]], flush=True)
if "ref" in sys.argv:
    look("ref", b.not_private("o", shape, "cuda", is_compiled=True)); gc.collect()
look("p", b.private("o", shape, "cuda", compile=True))
from unison.clip import alternatives
