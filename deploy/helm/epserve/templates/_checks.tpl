{{/* Values of workers that do not go together. Each renders nothing. */}}

{{/* Of one role. Takes root, role, worker. */}}
{{- define "epserve.checkWorker" -}}
{{- $worker := .worker }}
{{- $me := printf "workers.%s" .role }}
{{- $sizes := include "epserve.sizes" . | fromJson }}
{{- $gpu := eq $worker.device "cuda" }}
{{- $given := and (hasKey $worker.resources.limits "memory") $worker.startSeconds }}
{{- if and $gpu (not .root.Values.model.sizeGiB) (not $given) }}
{{- fail (printf "%s.device is cuda: give model.sizeGiB, the checkpoint's size (du -s --block-size=1G FOLDER), from which memory, CPUs, shared memory and start time follow; `ctl plan --values FILE` shows them" $me) }}
{{- end }}
{{- range $kind := list "requests" "limits" }}
{{- $count := index $worker.resources $kind $worker.gpuResource }}
{{- if and $gpu $count (ne (int $count) (int $worker.ranks)) }}
{{- fail (printf "%s.resources.%s has %v of %s for %d ranks: leave it out, each rank gets one" $me $kind $count $worker.gpuResource (int $worker.ranks)) }}
{{- end }}
{{- end }}
{{- $resources := include "epserve.workerResources" . | fromJson }}
{{- range $name := list "cpu" "memory" }}
{{- $limit := index $resources.limits $name }}
{{- if and $limit (gt (index $resources.requests $name | include "epserve.number" | float64) (include "epserve.number" $limit | float64)) }}
{{- fail (printf "%s.resources: the %s request %v is above the limit %v" $me $name (index $resources.requests $name) $limit) }}
{{- end }}
{{- end }}
{{- /* 5 GiB: what a process has that has CUDA and torch loaded. */}}
{{- $shm := ternary 0.0 (include "epserve.shmSize" . | include "epserve.number" | float64) $worker.hostIPC }}
{{- $least := addf $shm (mulf (ternary 5 0 $gpu) $worker.ranks 1073741824) }}
{{- if lt (include "epserve.number" $resources.limits.memory | float64) $least }}
{{- fail (printf "%s.resources.limits.memory is %v: shared memory counts towards it, and each GPU rank needs 5Gi; give %dGi or more" $me $resources.limits.memory (divf $least 1073741824 | ceil | int64)) }}
{{- end }}
{{- if and $worker.hostIPC $worker.shmSize }}
{{- fail (printf "%s.shmSize means nothing with hostIPC: /dev/shm is the node's" $me) }}
{{- end }}
{{- if and $worker.cache.hostPath $worker.cache.claim }}
{{- fail (printf "%s.cache: give hostPath or claim" $me) }}
{{- end }}
{{- if and $worker.rdma.count (not $worker.rdma.resource) }}
{{- fail (printf "%s.rdma.count needs rdma.resource, the name that the device plugin gives" $me) }}
{{- end }}
{{- $startup := (include "epserve.pod" (list .root $worker.pod) | fromJson).probes.startup }}
{{- $patience := mul ($startup.periodSeconds | default 10) ($startup.failureThreshold | default 0) }}
{{- $start := include "epserve.startSeconds" . | int64 }}
{{- if and $startup.failureThreshold (lt $patience $start) }}
{{- fail (printf "%s: probes.startup gives up after %d s, startSeconds is %d: leave failureThreshold out" $me $patience $start) }}
{{- end }}
{{- end -}}

{{/* Of both roles: what the KV pages of one must have for the other. Takes the root. */}}
{{- define "epserve.checkPair" -}}
{{- $prefill := include "epserve.kvForm" (dict "root" . "component" "prefill") | fromJson }}
{{- range $name, $other := include "epserve.kvForm" (dict "root" . "component" "decode") | fromJson }}
{{- $one := index $prefill $name }}
{{- if ne (toString $one) (toString $other) }}
{{- fail (printf "prefill has %s %v, decode %v: such workers are never paired, give it in workers.common" $name $one $other) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "epserve.kvForm" -}}
{{- $worker := include "epserve.worker" . | fromJson }}
{{- $form := dict "dtype" "auto" "page-tokens" 64 "load-format" "auto" }}
{{- $form = merge (dict) (pick $worker.settings "dtype" "page-tokens" "load-format") $form }}
{{- $drafts := ne (index $worker.settings "speculative-tokens" | default 0 | int) 0 }}
{{- $mtp := eq (index $worker.settings "speculative-method" | default "mtp") "mtp" }}
{{- $_ := set $form "MTP KV (speculative-tokens)" (and $drafts $mtp) }}
{{- if eq $form.dtype "auto" }}
{{- $_ := set $form "dtype" (ternary "bfloat16" "float32" (eq $worker.device "cuda")) }}
{{- end }}
{{- toJson $form }}
{{- end -}}

{{/* Of claims that several pods mount, where the cluster can be asked. Takes the root. */}}
{{- define "epserve.checkClaims" -}}
{{- $pods := dict }}
{{- range $role := list "prefill" "decode" }}
{{- $worker := include "epserve.worker" (dict "root" $ "component" $role) | fromJson }}
{{- with $worker.cache.claim }}
{{- $_ := set $pods . (add (get $pods . | default 0) (mul $worker.groups $worker.nodes)) }}
{{- end }}
{{- end }}
{{- if eq .Values.model.source "pvc" }}
{{- $_ := set $pods .Values.model.claim 2 }}
{{- end }}
{{- range $claim, $count := $pods }}
{{- $modes := (lookup "v1" "PersistentVolumeClaim" $.Release.Namespace $claim | default dict).spec | default dict | dig "accessModes" list }}
{{- if and $modes (gt (int64 $count) 1) (not (or (has "ReadWriteMany" $modes) (has "ReadOnlyMany" $modes))) }}
{{- fail (printf "the claim %s is %s, but several pods mount it: it must be ReadWriteMany (a model also ReadOnlyMany); on a single node use hostPath" $claim (first $modes)) }}
{{- end }}
{{- end }}
{{- end -}}
