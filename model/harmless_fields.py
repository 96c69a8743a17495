"""Fields of config.json that say nothing about what a DeepSeek-V3 model computes. Torch-free.

What is on no list may be another architecture's switch, and is refused: see `model.config`.
"""

# Of training, of writers, and what follows from other fields (MLA has a key of its own a head).
_OF_MODELS = """
    architectures attention_dropout auto_map aux_loss_alpha dtype ep_size head_dim initializer_range
    license model_max_length model_name num_key_value_heads output_router_logits pretraining_tp
    qk_head_dim router_aux_loss_coef seq_aux torch_dtype transformers_version unsloth_fixed
    unsloth_version use_cache
"""
# Those that transformers has for every model, of several of its versions; they are about training,
# about what its functions return, or about sampling, for which there is generation_config.json.
_OF_TRANSFORMERS = """
    add_cross_attention attn_implementation bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length name_or_path no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p
    use_bfloat16
"""
HARMLESS = frozenset((_OF_MODELS + _OF_TRANSFORMERS).split())
