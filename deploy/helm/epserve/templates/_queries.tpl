{{/* PromQL that says how much there is to do, of this release only. Without traffic: 0. */}}

{{- define "epserve.mine" -}}
namespace="{{ .Release.Namespace }}",app_kubernetes_io_instance="{{ .Release.Name }}"
{{- end -}}

{{- define "epserve.query.queueSeconds" -}}
histogram_quantile(0.9, sum by (le) (rate(epserve_worker_queue_time_seconds_bucket{ {{- include "epserve.mine" . }},role="prefill"}[2m]))) >= 0 or vector(0)
{{- end -}}

{{- define "epserve.query.firstTokenSeconds" -}}
histogram_quantile(0.9, sum by (le) (rate(epserve_time_to_first_token_seconds_bucket{ {{- include "epserve.mine" . }}}[2m]))) >= 0 or vector(0)
{{- end -}}

{{/* 1: no page is left. */}}
{{- define "epserve.query.kvUse" -}}
avg(epserve_kv_usage_ratio{ {{- include "epserve.mine" . }},role="decode"}) or vector(0)
{{- end -}}
