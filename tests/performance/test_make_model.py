from benchmarks import make_model
from llm_serving.text.tokenizer.detokenizer import IncrementalDetokenizer
from llm_serving.text.tokenizer.tokenizer import Tokenizer

SHAPE = {**make_model.SHAPES["15m"], "num_hidden_layers": 1}


def test_random_model_has_a_text_for_every_token_and_keeps_the_word_split(tmp_path):
    make_model.make_model(SHAPE, tmp_path)
    random, demo = Tokenizer.load(tmp_path), Tokenizer.load(make_model.DEMO_MODEL)
    text = "Count from 1 to 60. word31999"
    assert random.encode(text) == demo.encode(text)
    added = range(2048, make_model.VOCAB_SIZE)
    detokenizer = IncrementalDetokenizer(random, random.encode("Count"))
    assert [detokenizer.add([token_id]) for token_id in added] == [f" word{token_id}" for token_id in added]
