"""The id that a decode and a prefill worker must share to serve one another's tickets."""

from hashlib import blake2b


def deployment_id(
    namespace: str, model_name: str, weights: str, kv_form: str, layout_digest: str, transport: str
) -> str:
    """Return the id: 16 hex characters.

    `weights` is the fingerprint of the model's weights, `kv_form` that of how K/V is computed with
    them: KV of others would be silently wrong.
    """
    text = "\0".join((namespace, model_name, weights, kv_form, layout_digest, transport))
    return blake2b(text.encode(), digest_size=8).hexdigest()
