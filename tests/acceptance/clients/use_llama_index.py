from checking import MODEL, URL, check, package
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

package("llama-index-llms-openai-like")
options = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
chat = OpenAILike(model=MODEL, is_chat_model=True, max_tokens=32, **options)


@check("chat")
def _():
    return chat.chat([ChatMessage(role="user", content="Add 17 and 25.")]).message.content


@check("stream_chat")
def _():
    return "".join(
        piece.delta or "" for piece in chat.stream_chat([ChatMessage(role="user", content="Add 17 and 25.")])
    )


@check("complete")
def _():
    return OpenAILike(model=MODEL, is_chat_model=False, max_tokens=8, **options).complete("Add 17 and 25.").text


@check("embeddings")
def _():
    model = OpenAILikeEmbedding(model_name=MODEL, **options)
    return len(model.get_text_embedding_batch(["a", "b"])) == 2 and model.get_query_embedding("a")
