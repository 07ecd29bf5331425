from fasttrain.tools.profiling import memory_of


def op(name, ts, dur, tid=1):
    return dict(name=name, ts=ts, dur=dur, cat="cpu_op", tid=tid)


def memory(ts, address, size, tid=1):
    return dict(name="[memory]", ts=ts, tid=tid, args=dict(Addr=address, Bytes=size))


def test_what_is_alive_at_the_peak_and_who_allocated_it():
    ops = [op("aten::linear", 0, 20), op("aten::mm", 5, 10), op("aten::gelu", 30, 10), op("aten::add", 50, 10, tid=2)]
    changes = [
        memory(6, 0xA, 100),  # in mm
        memory(17, 0xB, 10),  # in linear, after mm
        memory(31, 0xC, 50),  # in gelu
        memory(39, 0xB, -10),
        memory(45, 0xE, 5),  # in no op
        memory(51, 0xF, 20, tid=2),  # the peak: 165
        memory(60, 0xA, -100),
        memory(61, 0xA, 60),  # the address again; 125
        memory(70, 0xDEAD, -1000),  # from before
    ]
    found = memory_of([*reversed(ops), *reversed(changes)])
    assert found["peak_bytes"] == 175
    assert found["alive_at_peak"] == [
        {"op": "aten::mm", "bytes": 100, "tensors": 1},
        {"op": "aten::gelu", "bytes": 50, "tensors": 1},
        {"op": "aten::add", "bytes": 20, "tensors": 1},
        {"op": "no op", "bytes": 5, "tensors": 1},
    ]
    assert found["timeline"][:3] == [(0.0, 100), (11.0, 110), (25.0, 160)]
    assert found["timeline"][-1] == (64.0, 135 - 1000)


def test_a_trace_without_memory():
    assert memory_of([op("aten::mm", 0, 1)]) == {"peak_bytes": 0, "alive_at_peak": [], "timeline": []}
