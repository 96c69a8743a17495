{{/* PromQL that says how much there is to do, of this release only. Without traffic: 0. Without the
     metrics of all workers that the router knows as ready: nothing, and replicas stay as they are. */}}

{{- define "epserve.mine" -}}
namespace="{{ .Release.Namespace }}",app_kubernetes_io_instance="{{ .Release.Name }}"
{{- end -}}

{{/* A condition: every worker of a role is scraped. Dict of root and component. */}}
{{- define "epserve.allScraped" -}}
{{- $mine := printf "%s,role=%q" (include "epserve.mine" .root) .component -}}
and on () count(epserve_worker_draining{ {{- $mine }}} == 0 and on (instance) epserve_kv_info{ {{- $mine }}}) >= max(epserve_router_workers{ {{- $mine }},state="ready"})
{{- end -}}

{{/* The 90th percentile of what prefill workers have measured; 0 if they have nothing to do, nothing
     if they have and bring nothing to an end. Dict of root and metric. */}}
{{- define "epserve.prefillQuantile" -}}
{{- $prefill := printf "{%s,role=\"prefill\"}" (include "epserve.mine" .root) -}}
(histogram_quantile(0.9, sum by (le) (rate({{ .metric }}_bucket{{ $prefill }}[2m]))) >= 0 or 0 * (sum(epserve_num_running_requests{{ $prefill }} + epserve_num_waiting_requests{{ $prefill }}) == 0)) {{ include "epserve.allScraped" (dict "root" .root "component" "prefill") }}
{{- end -}}

{{- define "epserve.query.queueSeconds" -}}
{{ include "epserve.prefillQuantile" (dict "root" . "metric" "epserve_worker_queue_time_seconds") }}
{{- end -}}

{{/* From when the prefill worker has the request: what waits for decode is not there yet. */}}
{{- define "epserve.query.firstTokenSeconds" -}}
{{ include "epserve.prefillQuantile" (dict "root" . "metric" "epserve_worker_time_to_first_token_seconds") }}
{{- end -}}

{{/* 1: no page is left. */}}
{{- define "epserve.query.kvUse" -}}
avg(epserve_kv_usage_ratio{ {{- include "epserve.mine" . }},role="decode"}) {{ include "epserve.allScraped" (dict "root" . "component" "decode") }}
{{- end -}}

{{/* Requests that decode workers have, and those that wait at the router for room there, as a share
     of what they may have. Those that prefill has not finished hold slots, but more decode workers
     would not help them: they do not count, nor does their part of those that wait. */}}
{{- define "epserve.query.slotUse" -}}
{{- $mine := include "epserve.mine" . -}}
{{- $decode := printf "{%s,role=\"decode\"}" $mine -}}
{{- $own := printf "epserve_num_running_requests%s + epserve_num_waiting_requests%s" $decode $decode -}}
sum({{ $own }}) * (1 + sum(epserve_router_num_waiting_requests{ {{- $mine }}}) / clamp_min(sum({{ $own }} + epserve_num_transferring_requests{{ $decode }}), 1)) / sum(epserve_max_running_requests{{ $decode }}) {{ include "epserve.allScraped" (dict "root" . "component" "decode") }}
{{- end -}}
