import time
from itertools import islice
from pathlib import Path
from splitserve.engine.latency_profile import Profile
from splitserve.planner.search.candidates import Hardware, Kind, Candidate
from splitserve.planner.search.goodput import Load, Question, sketch
from splitserve.planner.slo import parse_slo
from splitserve.planner.trace.readers import open_trace
hw=Hardware((Kind.of(Profile.read(Path("llama2-70b-h100x8"))),)); lvl=parse_slo("ttft=0.5@p90,tpot=0.05@p90")
for f,n,c,g in (("code",600,Candidate(12,4,0,2048,32),8.71),("conv",1000,Candidate(4,12,0,2048,64),50.07)):
    t=open_trace(Path(f"/work/shared/data/azure/AzureLLMInferenceTrace_{f}.csv")); r=tuple(t)
    first=Question.of(hw,Load(r[:n],t.block_size),lvl); whole=Question.of(hw,Load(r,t.block_size),lvl)
    comp=g/first.load.rate
    b=time.time()
    for k in (1,.8,.6,.4):
        print(f, "first", first.load.rate, "whole", whole.load.rate, "x",round(comp,2), k, "first-n:", round(sketch(first,c,g*k,give_up=False).attainment,3), "whole:", round(sketch(whole,c,comp*k*whole.load.rate,give_up=False).attainment,3), round(time.time()-b,1), flush=True)
