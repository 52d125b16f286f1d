from llm_serving.server.front_door.body_meter import BODY_PER_FRAMING, BodyMeter


def test_framing_counts_from_the_last_byte_of_the_body():
    meter = BodyMeter()
    meter.arrived(10)
    assert meter.framing == 10
    meter.arrived(6)
    meter.were_body(1)
    assert (meter.num_bytes, meter.framing) == (1, 15)
    meter.arrived(7)
    assert meter.framing == 22


def test_a_body_pays_for_its_framing():
    meter = BodyMeter()
    for _ in range(100):
        meter.arrived(5 + 5 * BODY_PER_FRAMING)
        meter.were_body(5 * BODY_PER_FRAMING)
    assert meter.framing == 0
    meter.arrived(9)  # since the last byte of the body
    assert meter.framing == 9


def test_each_head_begins_anew():
    meter = BodyMeter()
    meter.arrived(10)
    meter.were_body(3)
    meter.begin()
    assert (meter.num_bytes, meter.framing) == (0, 0)


def test_what_is_put_elsewhere_is_not_held():
    meter = BodyMeter()
    meter.were_body(300)
    assert meter.num_held == 300
    meter.hold_at_most(100)
    assert (meter.num_held, meter.num_bytes) == (100, 300)
    meter.begin()
    meter.were_body(300)
    assert meter.num_held == 300
