import numpy as np
from fedcore import rules
from fedcore.testing.rules import RuleContract
from tests.server.test_rules import RejectFew

RULES = {"RejectLong": rules.RejectLong(3), "ClipToMedian": rules.ClipToMedian(), "CapExamples": rules.CapExamples(2), "CapSteps": rules.CapSteps(2), "CountOnce": rules.CountOnce(),"Mean": rules.Mean(), "Median": rules.Median(), "TrimmedMean": rules.TrimmedMean(2), "MeaMed": rules.MeaMed(1), "Krum": rules.Krum(1), "MultiKrum": rules.MultiKrum(1), "Bulyan": rules.Bulyan(1), "GeometricMedian": rules.GeometricMedian(), "CentredClipping": rules.CentredClipping(3.0), "Few": RejectFew(least=1), "ClipNorm": rules.ClipNorm(), "PrivateMean": rules.PrivateMean(3.0, 1.0, 8, seed=3)}
for name, rule in RULES.items():
    globals()["Test"+name] = type("Test"+name, (RuleContract,), {"make_rule": lambda self, rule=rule: rule})
