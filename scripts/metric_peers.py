"""What SGLang, vLLM and NVIDIA Dynamo call the same thing, for docs/metrics.md."""

PEERS: dict[str, tuple[str, ...]] = {
    "epserve_requests_total": (
        "sglang:num_requests_total", "vllm:request_success_total",
        "dynamo_frontend_requests_total",
    ),
    "epserve_time_to_first_token_seconds": (
        "sglang:time_to_first_token_seconds", "vllm:time_to_first_token_seconds",
        "dynamo_frontend_time_to_first_token_seconds",
    ),
    "epserve_inter_token_latency_seconds": (
        "sglang:inter_token_latency_seconds", "vllm:inter_token_latency_seconds",
        "dynamo_frontend_inter_token_latency_seconds",
    ),
    "epserve_e2e_request_latency_seconds": (
        "sglang:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds",
        "dynamo_frontend_request_duration_seconds",
    ),
    "epserve_queue_time_seconds": ("sglang:queue_time_seconds", "vllm:request_queue_time_seconds"),
    "epserve_gateway_num_running_requests": ("dynamo_frontend_inflight_requests",),
    "epserve_gateway_num_waiting_requests": ("dynamo_frontend_queued_requests",),
    "epserve_gateway_kv_usage_ratio": (
        "sglang:token_usage", "vllm:kv_cache_usage_perc",
        "dynamo_component_kvstats_gpu_cache_usage_percent",
    ),
    "epserve_gateway_prompt_tokens_total": (
        "sglang:prompt_tokens_total", "vllm:prompt_tokens_total",
    ),
    "epserve_gateway_cached_tokens_total": ("sglang:cached_tokens_total",),
    "epserve_gateway_generation_tokens_total": (
        "sglang:generation_tokens_total", "vllm:generation_tokens_total",
    ),
    "epserve_request_prompt_tokens": (
        "vllm:request_prompt_tokens", "dynamo_frontend_input_sequence_tokens",
    ),
    "epserve_request_generation_tokens": (
        "vllm:request_generation_tokens", "dynamo_frontend_output_sequence_tokens",
    ),
    "epserve_gateway_moves_total": ("dynamo_frontend_model_migration_total",),
    "epserve_router_prefix_pages_total": (
        "sglang:cache_hit_rate", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
    ),
    "epserve_worker_time_to_first_token_seconds": ("vllm:request_prefill_time_seconds",),
    "epserve_num_running_requests": ("sglang:num_running_reqs", "vllm:num_requests_running"),
    "epserve_num_waiting_requests": (
        "sglang:num_queue_reqs", "sglang:num_prefill_bootstrap_queue_reqs",
        "sglang:num_decode_prealloc_queue_reqs", "vllm:num_requests_waiting",
    ),
    "epserve_num_transferring_requests": (
        "sglang:num_prefill_inflight_queue_reqs", "sglang:num_decode_transfer_queue_reqs",
        "vllm:num_requests_kv_fetch_by_stage",
    ),
    "epserve_kv_usage_ratio": (
        "sglang:token_usage", "vllm:kv_cache_usage_perc",
        "dynamo_component_kvstats_gpu_cache_usage_percent",
    ),
    "epserve_kv_info": ("vllm:cache_config_info",),
    "epserve_prefill_tokens_total": (
        "sglang:cached_tokens_total", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
        "dynamo_component_kvstats_gpu_prefix_cache_hit_rate",
    ),
    "epserve_generation_tokens_total": (
        "sglang:generation_tokens_total", "vllm:generation_tokens_total",
    ),
    "epserve_draft_tokens_total": (
        "sglang:spec_accept_length", "vllm:spec_decode_num_accepted_tokens_per_pos",
        "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens",
    ),
    "epserve_preemptions_total": ("sglang:num_retracted_requests_total", "vllm:num_preemptions"),
    "epserve_expert_balancedness": ("sglang:eplb_balancedness",),
    "epserve_kv_transfer_seconds": ("sglang:kv_transfer_latency_ms",),
    "epserve_kv_transfer_bytes_total": ("sglang:kv_transfer_total_mb",),
    "epserve_kv_transfer_failures_total": ("sglang:num_transfer_failed_reqs_total",),
}  # fmt: skip
