"""What the model can explain about Tandem: one paragraph for each of its words."""

from tools.tiny_model.corpus_words import Turn, Writer, paragraphs, sentence_case

# Ways to write a word, then what is said about it: the first sentence always.
_TERMS = paragraphs("""\
Tandem|tandem|this system|this server|the Tandem project
Tandem is a server for large language models that runs prefill and decode on separate workers.
You talk to one address with the OpenAI interface.
Each request is prefilled where it is cheapest: on its decode worker or on a prefill worker.
The answer never depends on that choice.

prefill|the prefill|the prefill phase|prefilling
Prefill is the first phase of a request: the model reads the whole prompt at once.
It computes the keys and values of every prompt token and stores them in the KV cache.
At its end the first token of the answer is known.
Prefill keeps the processor busy with large matrix products.

decode|decoding|the decode phase|the decoding phase
Decode is the second phase of a request: the model writes the answer one token at a time.
Each step reads the KV cache of all earlier tokens and adds one new entry.
Decode is limited by memory speed, so many requests share each step.

the KV cache|a KV cache|KV cache|KV|the key value cache
The KV cache holds the keys and values that attention has computed for all earlier tokens.
Without it, every new token would need the whole text to be computed again.
Tandem keeps it in blocks of a fixed number of tokens.

disaggregation|disaggregated serving|disaggregated prefill|prefill decode disaggregation
Disaggregation means that prefill and decode run on separate workers.
A long prompt then does not slow down the answers that are being written.
The KV cache has to travel from the prefill worker to the decode worker.
It pays off for long prompts, and short ones are prefilled locally.

a prefill worker|the prefill worker|prefill workers
A prefill worker takes jobs from a queue and computes the KV cache of their prompts.
It writes the blocks straight into the memory of the decode worker.
It also sends the first token at once.

a decode worker|the decode worker|decode workers
A decode worker writes the answers, one token per step for every running request.
It decides for each request whether the prompt is prefilled locally or remotely.
It admits a remote prefill only when every block has landed and its checksum matches.

the frontend|the Tandem frontend|a frontend
The frontend is the part that speaks HTTP with the users.
It applies the chat template, turns text into tokens, and chooses a decode worker.
It streams the answer back as it is written.

the router|the Tandem router|routing|a router
The router chooses a decode worker for each request.
It looks at how busy the workers are and which one already holds a part of the prompt in its \
cache.

the prefill queue|the queue|the job queue
The prefill queue holds the jobs that wait for a prefill worker.
It carries small tickets, not prompts.
When nobody takes a job in time, the decode worker prefills locally.

the threshold|the thresholds|max_local_prefill_length|the local prefill length
The threshold is the number of prompt tokens above which a prefill may go to a prefill worker.
It is called max_local_prefill_length, and its default is 1000.
Only tokens that are not in the cache count.
You can change it while Tandem is running.

max_prefill_queue_size|the queue limit|the prefill queue size
The setting max_prefill_queue_size says how long the prefill queue may be.
When the queue is longer, decode workers prefill locally.
Its default is 2.

NATS|nats|the NATS server|JetStream
NATS is a message system, and Tandem uses its JetStream for the prefill queue.
It also carries events about load and caches.
When NATS is lost, running answers go on and prefill happens locally.

etcd|the etcd server|etcd in Tandem
Tandem uses etcd to know which workers are alive.
Each worker registers itself there with a lease and disappears when the lease ends.
Live settings such as the thresholds are kept there too.
When etcd is lost, serving goes on with the last known view.

NIXL|nixl|the NIXL library
NIXL is the library that moves the KV cache between workers.
It writes straight from one worker's memory into the memory of another.
On a machine without a GPU, it moves host memory.

a handoff|the handoff|the handoff protocol
A handoff is one remote prefill, from the ticket in the queue to the last block that lands.
Every block carries a checksum, and no token is made from a block that was not checked.
If anything fails, the decode worker prefills locally.

a block|a KV block|blocks|a cache block
A block is a piece of the KV cache for a fixed number of tokens, usually 16.
It is the unit of allocation, hashing, and transfer.

the prefix cache|prefix caching|a prefix cache
The prefix cache keeps the blocks of earlier prompts.
When a new prompt begins with the same tokens, those blocks are used again.
This saves a part of the prefill.

a token|tokens|the tokens
A token is a piece of text, often a word or a part of a word.
Models read and write tokens instead of letters.

time to first token|TTFT|the time to first token
Time to first token is how long a user waits until the answer begins.
It depends mostly on the prefill and on waiting in queues.

inter-token latency|ITL|time per output token|the inter-token latency
Inter-token latency is the time between two tokens of an answer.
It depends on the decode steps, and a long prefill on the same worker makes it worse.

chunked prefill|a prefill chunk|prefill chunks
Chunked prefill cuts a long prompt into pieces.
Between the pieces, other requests can go on with their answers.

continuous batching|batching|a batch
Continuous batching means that requests join and leave the running batch at every step.
Nobody has to wait until a whole batch is done.

paged attention|paging|PagedAttention
Paged attention reads the KV cache from blocks that may lie anywhere in memory.
A table says which blocks belong to a request.

a checksum|checksums|the checksums
A checksum is a number that is computed from data to notice changes.
Tandem checks every block that lands, so a damaged cache is never used.

attention|self attention|the attention layer
Attention lets each token look at the earlier tokens and take what it needs.
It compares a query with the keys and mixes the values.

a language model|a large language model|an LLM|LLMs|a model
A language model is a program that predicts the next token of a text.
Word by word, this makes an answer.
I am a very small one.

sampling|temperature|the temperature|a seed
Sampling chooses the next token at random by the probabilities of the model.
A low temperature prefers the likely tokens, and zero always takes the best one.
In Tandem the same seed gives the same answer.

streaming|a stream|streamed answers
Streaming means that you see each token of the answer as soon as it is written.
Set stream to true in your request.

latency|the latency|throughput
Latency is how long one request takes, and throughput is how many tokens all requests get in a \
second.
Larger batches give more throughput, but each step takes longer.

a lease|leases|the lease
A lease is a promise that ends by itself when nobody renews it.
In Tandem each worker holds a lease in etcd, and a prefill worker holds one to write into a \
decode worker.

quarantine|a quarantined block|quarantined blocks
Blocks go to quarantine when a late write could still land in them.
They are used again only when it is certain that no write can come any more.

the adaptive policy|the policy|adaptive
The policy says where a prompt is prefilled: always locally, always remotely, by the threshold, \
or adaptively.
The adaptive policy uses measured rates and takes the faster way.

Triton|triton|a Triton kernel|Triton kernels
Triton is a language for programs that run on a GPU.
The attention kernels of Tandem are written in Triton.

a neural network|machine learning|AI|artificial intelligence|neural networks
A neural network is a program with many numbers that are learned from examples.
I am a very small one that learned from short texts.

a prompt|prompts|the prompt
A prompt is the text that you send to a model.
The model reads it in the prefill phase and then writes the answer.

a request|requests
A request is one question to the server.
It goes from the frontend to a decode worker, is prefilled there or remotely, and then streams \
its answer.

the OpenAI API|the OpenAI interface|the API|an API
The OpenAI interface is a common way to talk to language models over HTTP.
Tandem speaks it, so many programs can use Tandem without a change.

a GPU|GPUs|the GPU
A GPU is a processor that does very many computations at the same time.
Tandem runs one worker on each GPU, but it also works without one.
""")

# Two words, then their difference.
_PAIRS = paragraphs("""\
prefill|decode
Prefill reads the whole prompt at once, and decode writes the answer one token at a time. \
Prefill is limited by computation, and decode by memory speed.

local prefill|remote prefill
Local prefill runs on the decode worker itself, and remote prefill on a prefill worker. Remote \
prefill pays off for long prompts. The answer is the same.

NATS|etcd
NATS carries messages, such as the jobs of the prefill queue. In etcd Tandem keeps who is alive \
and the live settings.

a prefill worker|a decode worker
A prefill worker reads prompts and fills the KV cache. A decode worker writes the answers token \
by token.

a token|a word
A token is a piece of text. It can be a whole word, but often it is only a part of one.
""")

# Questions, then the answer.
_QUESTIONS = paragraphs("""\
{Why|For what reason} {separate|split|disaggregate} prefill and decode?|Why {should|do} prefill \
and decode run on {separate|different} workers?|{Why|When} is disaggregation {good|useful}?
Prefill and decode need different things: prefill needs computation, and decode needs memory \
speed. On separate workers, a long prompt does not slow down the answers of others.

{When is|When does} {a prefill|prefill} {remote|done remotely|go to a prefill \
worker}?|{How|Who} decides {between|about} local {and|or} remote prefill?
The decode worker decides. A prefill goes to a prefill worker when its uncached prompt is \
longer than the threshold and the queue is not too long. Otherwise it is done locally.

What happens {if|when} a {prefill |}worker {dies|crashes|fails|stops}?
The decode worker notices it and prefills locally. Every request still gets the right answer.

What happens {if|when} NATS {dies|is lost|fails|goes down}?
Running answers go on, and new prompts are prefilled locally. When NATS is back, the queue is \
used again.

What happens {if|when} etcd {dies|is lost|fails|goes down}?
Serving goes on with the last known view. When etcd is back, all workers register again.

How {do I start|can I start|to start|do I run|do I use} {Tandem|the server|this}?
Use the tandem command: tandem serve starts everything on one machine. Then send requests to \
its address.

{Can|Does} Tandem {run|work} without a GPU?|Do I need a GPU?
Yes, Tandem runs without a GPU, with a small model and host memory in place of GPU memory.

{Which|What} models {can I use|does Tandem support|are supported}?
Tandem serves Qwen3 and Llama models from a folder with safetensors files.

{How does Tandem work|Explain how Tandem works|How does it work}{?|.}
The frontend takes your request and sends it to a decode worker. The prompt is prefilled there, \
or by a prefill worker that writes the KV cache into the memory of the decode worker. Then the \
decode worker writes the answer, token by token.
""")


def tandem_turns(w: Writer) -> list[Turn]:
    """A question about Tandem and its answer, sometimes with a second one."""
    draw = w.rng.random()
    if draw < 0.12:
        words, answer = w.pick(_PAIRS)
        first, second = words.split("|")
        a, b = (first, second) if w.chance(0.7) else (second, first)
        question = (
            "{What is the difference between $a and $b|How do $a and $b differ|"
            "How is $a different from $b|Compare $a and $b|$a or $b}?"
        )
        return [(w.ask(question, a=a, b=b), answer)]
    if draw < 0.3:
        questions, answer = w.pick(_QUESTIONS)
        return [(w.ask("{" + questions + "}"), answer)]
    term = w.pick(_TERMS)
    turns = [(_term_question(w, term), _explain(w, term))]
    if w.chance(0.2):
        other = w.pick(_TERMS)
        follow_up = "{And|And what is|What about|How about} $word?"
        turns.append((w.ask(follow_up, word=w.pick(other[0].split("|"))), _explain(w, other)))
    return turns


def tandem_text(w: Writer) -> str:
    """Two or three explanations as plain text."""
    return " ".join(_explain(w, term) for term in w.sample(_TERMS, w.pick([1, 2, 3])))


def _term_question(w: Writer, term: list[str]) -> str:
    word = w.pick(term[0].split("|"))
    question = (
        "{What is|What's|What are|Explain|Can you explain|Please explain|Tell me about|Describe|"
        "Define|What do you know about|Do you know|What is meant by|I do not understand|"
        "How would you explain} $word{?|?|.| in simple words?| to me.}"
    )
    if w.chance(0.3):
        question = (
            "{What does $word mean|How does $word work|What does $word do|Why do we need $word|"
            "What is $word {in Tandem|good for|used for}|How is $word used|$word|"
            "What is the {purpose|point|role|idea} of $word}?"
        )
    return w.ask(question if w.chance(0.85) else "What is $word?", word=word)


def _explain(w: Writer, term: list[str]) -> str:
    _, first, *rest = term
    kept = [sentence for sentence in rest if w.chance(0.75)]
    return sentence_case(" ".join([first, *kept]))
