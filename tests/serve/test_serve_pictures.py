"""Pictures in requests: read within bounds, made into inputs by the model's own processor, and answered exactly."""

import base64
import contextlib
import functools
import http.server
import io
import threading
import time
import zlib

import pytest
import torch
from families import make_draft
from pictures import make_picture_target
from PIL import Image
from served import CHAT, ask, chat, content, refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ImageProcessorPil, Gemma3Processor, PreTrainedTokenizerFast

import dflash
from dflash_serve import pictures as bounds
from dflash_serve.pictures import PictureReader
from dflash_serve.prompts import PromptReader
from dflash_serve.receipts import ReceiptFolder
from dflash_serve.scheduler import Scheduler
from dflash_serve.service import Service

TEMPLATE = (
    "{% for said in messages %}{% for part in said.content %}"
    "{{ '<start_of_image>' if part.type == 'image' else part.text }} {% endfor %}{% endfor %}"
)


@functools.cache
def processor():
    words = {f"w{number}": number for number in range(97)}
    for word, number in (("<pad>", 0), ("<image_soft_token>", 5), ("<start_of_image>", 7), ("<end_of_image>", 8)):
        words = {**{name: at for name, at in words.items() if at != number}, word: number}
    inner = Tokenizer(models.WordLevel(words, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", chat_template=TEMPLATE,
        extra_special_tokens={
            "image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
        },
    )  # fmt: skip
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=4)


@pytest.fixture(scope="module")
def target():
    return make_picture_target("gemma3")


@pytest.fixture
def serve(target):
    """Return a function that makes a service; all are closed after the test."""
    made = []

    def make(receipts=None, **options):
        generator = dflash.Generator(target, make_draft(target), max_length=256, batch_size=2, prefill_chunk=8)
        scheduler = Scheduler(generator, max_waiting=8)
        made.append(scheduler)
        reads = None if options.pop("refuses", False) else PictureReader(processor(), **options)
        tokenizer = processor().tokenizer
        folder = None if receipts is None else ReceiptFolder(receipts, target, tokenizer, scheduler)
        reader = PromptReader(tokenizer, pictures=reads)
        return Service(scheduler=scheduler, reader=reader, name="pair", version="0", receipts=folder)

    yield make
    for scheduler in made:
        scheduler.close(drain=False)


def picture(seed, size=(20, 14), format="PNG"):
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    written = io.BytesIO()
    made = Image.fromarray(pixels.to(torch.uint8).numpy())
    made.save(written, format)
    return made, written.getvalue()


def url(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def said(*parts):
    """Return a request; what is no word of the vocabulary is the URL of a picture."""
    parts = [
        {"type": "text", "text": part} if part.startswith("w") else {"type": "image_url", "image_url": {"url": part}}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 12, "temperature": 0}


def inputs_of(text, images):
    return processor()(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)


def own(target, text, images):
    inputs = inputs_of(text, images)
    ids = target.generate(**inputs, max_new_tokens=12, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    return processor().tokenizer.decode(ids[0], skip_special_tokens=True)


def test_answers_are_those_of_the_model(serve, target):
    service = serve()
    (first, png), (second, webp) = picture(1), picture(2, (31, 40), "WEBP")
    second = Image.open(io.BytesIO(webp)).convert("RGB")
    one = content(ask(service, CHAT, said("w20 w33", url(png), "w41")))
    assert one == own(target, "w20 w33 <start_of_image> w41 ", [first])
    two = content(ask(service, CHAT, said(url(png), "w20", url(webp, "webp"), "w60")))
    assert two == own(target, "<start_of_image> w20 <start_of_image> w60 ", [first, second])
    assert content(ask(service, CHAT, said("w20 w33", url(webp), "w41"))) != one
    plain = content(ask(service, CHAT, said("w20 w33 w41")))
    ids = processor().tokenizer("w20 w33 w41 ", return_tensors="pt").input_ids
    expected = target.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert plain == processor().tokenizer.decode(expected, skip_special_tokens=True)


def test_receipts_name_the_pictures_which_the_server_does_not_keep(serve, target, tmp_path):
    service, (made, png) = serve(receipts=tmp_path), picture(1)
    id = ask(service, CHAT, said("w20", url(png))).json()["id"]
    receipt = dflash.Receipt.parse(ask(service, f"/v1/receipts/{id}", None).json())
    inputs = inputs_of("w20 <start_of_image> ", [made])
    assert dflash.verify(receipt, target, pictures={name: inputs[name] for name in receipt.pictures}).follows
    refused(ask(service, f"/v1/receipts/{id}/verify", b""), "pass pictures=")


PNG = base64.b64encode(picture(1)[1]).decode()
WORDS = [{"type": "text", "text": "w20"}, {"type": "text", "text": "w41"}]
PLAIN = [WORDS[0], {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}, WORDS[1]]
BLOCKS = [WORDS[0], {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}, WORDS[1]]
ITEMS = [WORDS[0], {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}, WORDS[1]]
USED = {"type": "tool_use", "id": "c", "name": "w9", "input": {}}
SHOWN = {  # the same picture in each API, of the user and in a tool's result
    "chat": (CHAT, {"messages": [{"role": "user", "content": PLAIN}]}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": BLOCKS}]}),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": ITEMS}]}),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "w20", "images": [PNG]}], "stream": False}),
    "generate": ("/api/generate", {"prompt": "w20", "images": [PNG], "stream": False}),
    "message's tool": ("/v1/messages", {"messages": [
        {"role": "user", "content": "w20"}, {"role": "assistant", "content": [USED]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": BLOCKS}]},
    ]}),
    "response's tool": ("/v1/responses", {"input": [
        {"role": "user", "content": "w20"},
        {"type": "function_call", "call_id": "c", "name": "w9", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": ITEMS},
    ]}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_every_api_takes_pictures_and_a_server_without_them_says_so(serve, target, name):
    (path, fields), sampling = SHOWN[name], {"temperature": 0, "max_tokens": 12, "max_output_tokens": 12}
    fields = fields | sampling | {"options": {"temperature": 0, "num_predict": 12}}
    if "tool" not in name:  # the template of this test shows no calls
        found = ask(serve(), path, fields)
        order = "<start_of_image> w20 " if path.startswith("/api") else "w20 <start_of_image> w41 "
        assert content(found) == own(target, order, [picture(1)[0]])
    response = ask(serve(refuses=True), path, fields)
    assert response.status_code == 200, response.text
    assert any("with --pictures only" in warning for warning in response.json()["warnings"])


@contextlib.contextmanager
def hosting(respond):
    """Answer requests on a port of this machine; yield its URL."""
    methods = {"do_GET": respond, "log_message": lambda *_: None}
    handler = type("Handler", (http.server.BaseHTTPRequestHandler,), methods)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_urls_are_fetched_only_if_that_is_allowed(serve, target):
    made, png = picture(3)

    def respond(handler):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(png)

    with hosting(respond) as host:
        body = said("w20", f"{host}/p.png")
        refused(ask(serve(), CHAT, body), "--allow-image-urls")
        answered = ask(serve(allows_urls=True), CHAT, body)
    assert content(answered) == own(target, "w20 <start_of_image> ", [made])


def test_a_photo_is_turned_upright_as_transformers_turns_it(serve, target):
    made, _ = picture(4, (24, 10))
    tags = made.getexif()
    tags[0x0112] = 6  # taken with the camera on its side
    written = io.BytesIO()
    made.save(written, "PNG", exif=tags)
    upright = made.rotate(-90, expand=True)
    answer = content(ask(serve(), CHAT, said("w20", url(written.getvalue()))))
    assert answer == own(target, "w20 <start_of_image> ", [upright])
    assert answer != own(target, "w20 <start_of_image> ", [made])


def test_a_photo_with_broken_exif_is_shown_as_it_lies(serve, target):
    made, plain = picture(4, (24, 10))
    service, shown = serve(), own(target, "w20 <start_of_image> ", [made])
    for exif, damage in ((b"junk", 0), (b"", 0), (b"II*\0" + b"\xff" * 20, 0), (b"II*\0", 1), (b"junk", 1)):
        chunk = b"eXIf" + exif
        whole = len(exif).to_bytes(4, "big") + chunk + (zlib.crc32(chunk) ^ damage).to_bytes(4, "big")
        for place in (33, len(plain) - 12):  # after IHDR, and before IEND
            assert content(ask(service, CHAT, said("w20", url(plain[:place] + whole + plain[place:])))) == shown


def test_hosts_that_are_slow_or_lead_elsewhere_are_given_up(serve, monkeypatch):
    def respond(handler):
        handler.send_response(302 if "away" in handler.path else 200)
        handler.send_header("Location", "ftp://127.0.0.1:1/p.png")
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(20 if "slow" in handler.path else 0):
                handler.wfile.write(b"x")
                time.sleep(0.05)

    monkeypatch.setattr(bounds, "_SECONDS", 0.2)
    service = serve(allows_urls=True)
    words = {"slow": "more than 0.2 s", "away": "unknown url type", "a b": "control characters"}
    with hosting(respond) as host:
        for path, message in words.items():
            refused(ask(service, CHAT, said(f"{host}/{path}")), message)


def test_tools_that_the_template_does_not_write_are_refused_with_pictures(serve):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    body = said("w20", url(picture(1)[1])) | {"tools": [tool]}
    refused(ask(serve(), CHAT, body), "loses tools")


def test_what_is_no_picture_or_too_large_is_refused(serve, monkeypatch):
    service, png = serve(), picture(1)[1]

    def fails(message, *parts, service=service):
        refused(ask(service, CHAT, said(*parts)), message)

    fails("picture 1 must be a data: URL, got 'file'", "file:///etc/passwd")
    fails("picture 1 cannot be read", "w20", url(b"GIF89a"))
    fails("picture 2 cannot be read", url(png), url(png[:40]))
    fails("picture 1 cannot be read as PNG, JPEG", url(picture(1, format="ICO")[1], "x-icon"))
    fails("is not in base64", "data:image/png;base64,!!!!")
    fails("must be a data: URL in base64", "data:image/png,abc")
    fails("may have 16 pictures, this one has 17", *[url(png)] * 17)
    monkeypatch.setattr(bounds, "MAX_PIXELS", 20 * 14 - 1)
    fails("may have 279 pixels together: picture 1 has 20 x 14, and 279 are left", url(png))
    monkeypatch.setattr(bounds, "MAX_BYTES", 100)
    fails("may have 100 bytes, it has more", url(png))
    assistant = {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": url(png)}}]}
    refused(ask(service, CHAT, chat() | {"messages": [assistant]}), "roles user and tool")
