import collections, random
from hypothesis import given, settings, HealthCheck
import rlflow.scheduler.compile as C
from tests.scheduler.strategies import *
seen = collections.Counter(); examples = {}
def test_hunt():
    from rlflow.scheduler.facts import Facts
    @settings(max_examples=1500, database=None)
    @given(graphs().flatmap(lambda g: st.tuples(st.just(g), placements(g), st.sampled_from(["cpu","cpu","h100"]), st.sampled_from([2.0, 1.0, 0.98, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3]))))
    def run(case):
        g,p,kind,share=case
        n=p.num_devices()
        try:
            try: most=compile_plan(g,p,cluster(kind,n,PLENTY)).plan.peaks.values()
            except PlanError: seen["planerror plenty"]+=1; return
            c=compile_plan(g,p,cluster(kind,n,max(1,int(share*max(most)))))
            seen["ok"]+=1
            ks=collections.Counter(a.kind for a in c.plan.actions)
            for k in ks: seen["ok with "+k]+=1
        except PlanError as e: seen["planerror "+e.findings[0].code]+=1
        except Exception as e:
            import re
            key=type(e).__name__+": "+str(e)
            line=[l for l in str(e).splitlines()][0] if str(e) else ""
            key=type(e).__name__+": "+re.sub(r"[\w./@#:>-]*[./@:][\w./@#:>-]*|\d+|\['.*","_",line)
            seen[key]+=1
            old=examples.get(key)
            size=len(g.nodes)*10+len(p.assign)+len(p.pools)
            if old is None or size<old[0]: examples[key]=(size,g,p,kind,share,str(e))
    run()
    for k,v in seen.most_common(): print(v,k)
    for k,(s,g,p,kind,share,msg) in examples.items():
        print("=====",k); print([ (n.name,n.model,n.every) for n in g.nodes]); print([(m.name,m.path) for m in g.models]); print(p.pools,{k:v.describe() for k,v in p.assign.items()},kind,share); print(msg[:600])
